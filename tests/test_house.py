"""Rules of the repository: imports run one way, help imports nothing heavy, and public names are fixed."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "solrl_proto": ROOT / "proto",
    "solrl_core": ROOT / "core",
    "solrl_engine": ROOT / "core",
    "solrl_minis": ROOT / "minis",
    "solrl_client": ROOT / "clients",
    "solrl_http": ROOT / "services",
    "solrl_remote": ROOT / "clients",
    "solrl_reward": ROOT / "services",
    "solrl_rollout": ROOT / "services",
    "solrl_trainer": ROOT / "trainer",
    "minis_recipe": ROOT / "benchmarks",
}
SCRIPTS = ("benchmarks", "scripts")
ALLOWED = {
    "solrl_proto": set(),
    "solrl_core": {"solrl_proto"},
    "solrl_engine": {"solrl_core", "solrl_proto"},
    "solrl_minis": {"solrl_core", "solrl_proto"},
    "solrl_client": {"solrl_proto"},
    "solrl_http": {"solrl_proto"},
    "solrl_remote": {"solrl_client", "solrl_core", "solrl_proto"},
    "solrl_reward": {"solrl_client", "solrl_core", "solrl_engine", "solrl_http", "solrl_proto", "solrl_remote"},
    "solrl_rollout": {"solrl_client", "solrl_core", "solrl_engine", "solrl_http", "solrl_proto", "solrl_remote"},
    "solrl_trainer": {"solrl_client", "solrl_core", "solrl_engine", "solrl_proto", "solrl_remote"},
    "minis_recipe": {"solrl_core", "solrl_minis", "solrl_proto"},
}
HEAVY = {
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "scipy",
    "matplotlib",
    "fastapi",
    "starlette",
    "uvicorn",
    "redis",
}


def sources(package: str) -> list[Path]:
    found = sorted((PACKAGES[package] / package).rglob("*.py"))
    assert found, package
    return found


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, including functions and `import_module`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec"):
                names.add(str(node.args[0].value))
    return {name.partition(".")[0] for name in names}


def modules(package: str) -> dict[str, Path]:
    """Dotted names of a package's modules, and their files."""
    files = {}
    for path in sources(package):
        parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def needed(path: Path, among: Collection[str]) -> set[str]:
    """Modules of `among` that a file imports, including imports within functions and for types."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module; any other name is the package's own.
            names |= inner & set(among) | ({node.module} if inner - set(among) else set())
    return names & set(among)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    for path in sources(package):
        ours = {name for name in imported(path) if name.startswith(("solrl", "minis"))} - {package}
        assert ours <= ALLOWED[package], path


FLOORS = (
    *("algorithms", "ranks", "prompts", "settings", "policy", "memory", "run_folder", "rollouts", "service"),
    *("trackers", "records", "session", "evaluation", "loop", "report", "calibration", "commands", "__main__"),
)
"""Folders, subfolders and modules of the trainer, from the ground up."""


def test_the_trainer_imports_only_from_its_own_floor_and_below() -> None:
    files, trainer = modules("solrl_trainer"), PACKAGES["solrl_trainer"] / "solrl_trainer"
    floors = {name: path.stem if path.parent == trainer else path.parent.name for name, path in files.items()}
    assert set(floors.values()) == {*FLOORS, "__init__"}
    for name, path in files.items():
        for below in needed(path, files):
            assert FLOORS.index(floors[below]) <= FLOORS.index(floors[name]), f"{name} imports {below}"


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"minis_recipe", "solrl_minis"}))
def test_the_miniatures_are_imported_only_by_entry_points(package: str) -> None:
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("solrl_minis"), path
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert all(
        target.startswith(("solrl_minis.", "solrl_remote."))
        for group, entries in declared.items()
        for target in entries.values()
    ), declared


def test_tests_import_nothing_from_benchmarks_which_share_their_support() -> None:
    benchmarks = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    for path in (ROOT / "tests").rglob("*.py"):
        assert not imported(path) & benchmarks - {"tests"}, path
    for path in {path for folder in SCRIPTS for path in (ROOT / folder).rglob("*.py")}:
        if not path.is_relative_to(ROOT / "benchmarks/tests"):
            modules = re.findall(
                r"^ *(?:from|import) ((?:tests|pytest)\b[\w.]*)", path.read_text("utf-8"), re.MULTILINE
            )
            assert all(module.startswith("tests.support") for module in modules), path


def test_the_contract_and_the_core_import_no_web_libraries() -> None:
    for path in sources("solrl_proto"):
        assert imported(path) - set(sys.stdlib_module_names) - {"solrl_proto"} <= {"pydantic"}, path
    for path in sources("solrl_core"):
        assert not imported(path) & {"fastapi", "starlette", "uvicorn", "redis", "httpx", "tyro"}, path
        assert "solrl_proto.problems" not in path.read_text(encoding="utf-8"), f"{path}: HTTP statuses are the edges'"


def test_every_package_but_the_minis_recipe_is_in_the_distribution() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(path).name for path in built["packages"]} == set(PACKAGES) - {"minis_recipe"}


def modules_after(code: str) -> tuple[str, set[str]]:
    """Output of a new interpreter, and the top-level modules that it has imported."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('\\nMODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed, _, modules = done.stdout.rpartition("\nMODULES ")
    return printed, {name.partition(".")[0] for name in modules.split()}


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("solrl-train", ["--help"], "evaluate"),
        ("solrl-train", ["run", "--help"], "--rollout-url"),
        ("solrl-train", ["presets"], "mini-sana/sol_rl/clipscore"),
        ("solrl-reward", ["--help"], "serve"),
        ("solrl-reward", ["serve", "--help"], "--rewards"),
        ("solrl-rollout", ["--help"], "serve"),
        ("solrl-rollout", ["serve", "--help"], "--model"),
    ],
)
def test_help_imports_nothing_heavy(program: str, arguments: list[str], said: str) -> None:
    script = Path(sys.executable).parent / program
    printed, modules = modules_after(
        f"import runpy; sys.argv = {[program, *arguments]}; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    assert said in printed
    assert program.replace("-train", "_trainer").replace("-", "_") in modules
    of_trainer = program == "solrl-train" and "--help" in arguments  # a service's options are pydantic settings
    assert not modules & (HEAVY | ({"pydantic"} if of_trainer else set()))


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("import solrl_proto.noise, solrl_proto.problems, solrl_proto.adapters", {*PACKAGES, "numpy"}),
        ("import solrl_core.registry, solrl_core.errors, solrl_trainer.prompts.prompt_sets", set()),
        ("import solrl_trainer.settings.presets as all; all.resolve('mini-sana/sol_rl/clipscore')", set()),
    ],
)
def test_the_contract_imports_alone_and_settings_are_resolved_without_torch(code: str, others: set[str]) -> None:
    _, modules = modules_after(code)
    assert "pydantic" in modules
    assert not modules & (HEAVY | others - {"solrl_proto"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_circular_imports(package: str) -> None:
    files = modules(package)
    TopologicalSorter({name: needed(path, files) for name, path in files.items()}).prepare()


CONTENTLESS = "asked each few found given held known left made many most one own said seen shown taken told used wanted"
PLAINLY_NAMED = ("clients", "core", "deploy", "examples", "minis", "proto", "services", "trainer")


def contentless(code: str) -> list[tuple[int, str]]:
    """Lines and names of variables, parameters and functions, not of fields such as `box.left`, that name no value."""
    tree = ast.parse(code)
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    fields = {line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}
    bound = {
        (node.lineno, node.arg if isinstance(node, ast.arg) else node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        if node not in fields
    }
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    bound |= {(node.lineno, node.name.strip("_")) for node in functions}
    return sorted((line, name) for line, name in bound if name in CONTENTLESS.split())


@pytest.mark.parametrize("folder", PLAINLY_NAMED)
def test_names_say_what_the_value_is(folder: str) -> None:
    """A noun, such as `matches`, `options` or `row`, in place of `found`, `given` or `one`."""
    assert [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in contentless(path.read_text("utf-8"))
    ] == []


def test_nothing_is_unpickled_that_ruff_lets_pass() -> None:
    for package in PACKAGES:
        for path in sources(package):
            assert not imported(path) & {"cloudpickle", "joblib"}, path
            calls = re.findall(r"\btorch\.load\(.*", path.read_text(encoding="utf-8"))
            assert all("weights_only=True" in call for call in calls), path


def test_no_text_is_read_as_rich_s_markup() -> None:
    """It would lose its brackets, as in solrl[ocr] and the names of files."""
    for package in PACKAGES:
        for path in sources(package):
            calls = re.findall(r"\bConsole\(.*", path.read_text(encoding="utf-8"))
            assert all("markup=False" in call for call in calls), path
