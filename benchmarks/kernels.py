"""Speed of the product's kernels at the models' shapes: `python benchmarks/kernels.py`. Takes about two minutes.

Times each in turns with its plain twin under torch.compile, and attention with cuDNN's. Writes
docs/results/kernels.{json,md}.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from solrl_core import kernels
from solrl_core.kernels import bounded_attention, depthwise, modulate, rope, rows
from solrl_core.kernels.convolve import packed_weight, plain_convolve, plain_convolve_moments
from solrl_core.kernels.group_norm import plain_group_moments, plain_group_norm_silu
from solrl_core.kernels.operation import has_descriptors
from solrl_core.kernels.wide_attention import plain_wide_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS, CALLS = 5, 10
AHEAD = 10_000_000
"""Cycles that the GPU waits before a round, in which the CPU launches all calls."""
EPS = 1e-6
GROUPS = 32
HEAD = """# Kernels

By `python benchmarks/kernels.py` on one {device}, torch {torch}, BF16. Medians of {rounds} rounds of {calls} calls, in
turns. A twin is the same arithmetic in torch's operations, under torch.compile. Errors are relative to the twin in
float32; quantised results are compared after quantising.

| operation | ms | beside | ms | speed-up | error | error beside |
|---|---|---|---|---|---|---|
"""

Operation = Callable[..., Any]


class Case(NamedTuple):
    """An operation at one shape.

    Attributes:
        name: operation, model and batch.
        kernel: the product's.
        beside: the same operation without it, named by `rival`.
        inputs: arguments of both.
        reference: the same operation in float32.
    """

    name: str
    kernel: Operation
    beside: Operation
    inputs: tuple[Any, ...]
    reference: Operation
    rival: str = "twin"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if not torch.cuda.is_available() or not has_descriptors(torch.device("cuda")):
        parser.error("expected a GPU of compute capability 9.0 or above: run it on such a GPU")
    torch.backends.cudnn.allow_tf32 = False  # the reference's convolution
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    lines = [HEAD.format(device=device, torch=torch.__version__, rounds=ROUNDS, calls=CALLS).rstrip("\n")]
    measurements = []
    print(lines[0])
    for case in cases():
        row = measured(case)
        measurements.append(row)
        figures = f"{row['ms']:.3f} | {case.rival} | {row['beside_ms']:.3f} | {row['beside_ms'] / row['ms']:.2f}"
        lines.append(f"| {case.name} | {figures} | {row['error']:.2g} | {row['beside_error']:.2g} |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kernels.json").write_text(json.dumps({"device": device, "rows": measurements}, indent=1) + "\n")
    (args.out / "kernels.md").write_text("\n".join(lines) + "\n")


def cases() -> Iterator[Case]:
    """All operations; inputs are made as each is reached."""
    twin = kernels.plain_linear_attention
    for batch in (24, 6):
        given = (*(random(batch, 1024, 2240) for _ in range(3)), 70)
        yield Case(f"linear attention, SANA, {batch}", kernels.linear_attention, twin, given, in_float32(twin))
    twin = depthwise.plain_silu_depthwise_glu
    given = (random(24, 32, 32, 11200), random(11200, 1, 3, 3) * 0.3, random(11200))
    yield Case("depthwise of the feed-forward, SANA, 24", kernels.silu_depthwise_glu, twin, given, in_float32(twin))
    for name, batch, tokens, heads in (
        ("SD3.5-L 1024², 8", 8, 4096 + 205, 38),
        ("SD3.5-L 1024², 2", 2, 4096 + 205, 38),
        ("SD3.5-M 512², 24", 24, 1024 + 205, 24),
    ):
        given = tuple(random(batch, tokens, heads, 64) for _ in range(3))
        yield Case(
            f"attention, {name}", bounded_attention.bounded_attention, cudnn, given, in_float32(attention), "cuDNN"
        )
    for name, batch, tokens, length in (("SD3.5-L, 8", 8, 4096, 2432), ("FLUX.1, 24", 24, 1024, 3072)):
        x, out = random(batch, tokens, length), random(batch, tokens, length)
        shift, scale, gate = random(batch, 6 * length).chunk(6, 1)[3:]
        twin = modulate.plain_norm_modulate_quantize
        given = (x, scale, shift, EPS)
        yield Case(f"norm, modulate, quantise, {name}", kernels.norm_modulate_quantize, twin, given, twin)
        twin = modulate.plain_add_norm_modulate_quantize
        given = (x, out, gate, scale, shift, EPS)
        yield Case(f"add, norm, modulate, quantise, {name}", kernels.add_norm_modulate_quantize, twin, given, twin)
    twin = rows.plain_quantize_rows
    for name, length, activation in (("quantise", 3072, ""), ("GELU, quantise", 12288, "gelu_tanh")):
        given = (random(24, 1024, length), activation)
        yield Case(f"{name}, FLUX.1, 24", kernels.quantize_rows, twin, given, twin)
    twin = rope.plain_rms_norm_rope
    angles = torch.rand(1152, 64, device="cuda")
    whole, text, *weights = random(24, 1152, 24, 128), random(24, 128, 24, 128), random(128), random(128)
    rest = (weights[0], angles.cos(), angles.sin(), EPS)
    for name, given in (
        ("norm and positions", (whole, *rest)),
        ("norm and positions, with text", (random(24, 1024, 24, 128), *rest, text, weights[1])),
    ):
        yield Case(f"{name}, FLUX.1, 24", kernels.rms_norm_rope, twin, given, in_float32(twin))
    yield from cases_of_decoders()


def cases_of_decoders() -> Iterator[Case]:
    """Operations of the decoders of SD3.5 and SANA, for 3 images."""
    twin = plain_convolve
    for name, size, channels, enlarge in (("convolution", 1024, 128, False), ("enlarging convolution", 512, 256, True)):
        weight = packed_weight(random(channels, channels, 3, 3) / (3 * channels**0.5), enlarge=enlarge)
        given = (random(3, size, size, channels).movedim(-1, 1), weight, random(channels), enlarge, False)
        yield Case(f"{name}, {size}², 3", kernels.convolve, twin, given, in_float32(twin))
    x, residual = (random(3, 1024, 1024, 128).movedim(-1, 1) for _ in range(2))
    weight = packed_weight(random(128, 128, 3, 3) / (3 * 128**0.5), enlarge=False)
    scale, offset = random(128), random(128)
    kernel, twin = (
        convolution_and_norm(kernels.convolve_moments, kernels.group_norm_silu),
        convolution_and_norm(plain_convolve_moments, plain_group_norm_silu),
    )
    given = (x, weight, random(128), residual, scale, offset)
    yield Case("convolution, residual, group norm and SiLU, 1024², 3", kernel, twin, given, in_float32(twin))
    kernel, twin = (
        norm(kernels.group_moments, kernels.group_norm_silu),
        norm(plain_group_moments, plain_group_norm_silu),
    )
    yield Case("group norm and SiLU, 1024², 3", kernel, twin, (x, scale, offset), in_float32(twin))
    twin = plain_wide_attention
    given = tuple(random(3, 128**2, 512) for _ in range(3))
    yield Case("attention over pixels, 128², 3", kernels.wide_attention, twin, given, in_float32(twin))


def random(*shape: int) -> Tensor:
    """Standard normal numbers in BF16, on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def convolution_and_norm(convolve_moments: Operation, group_norm_silu: Operation) -> Operation:
    """A convolution with a residual, and the norm that takes its moments."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        out, moments = convolve_moments(x, weight, bias, residual, GROUPS)
        normed: Tensor = group_norm_silu(out, moments, scale, offset, EPS)
        return normed

    return run


def norm(group_moments: Operation, group_norm_silu: Operation) -> Operation:
    """A group norm with its own moments."""
    return lambda x, scale, offset: group_norm_silu(x, group_moments(x, GROUPS), scale, offset, EPS)


def in_float32(operation: Operation) -> Operation:
    """The operation with all tensors converted to float32 first."""
    return lambda *given: operation(*(x.float() if isinstance(x, Tensor) else x for x in given))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's attention of [B, S, H, D]."""
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2)


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attention` by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention(query, key, value)


@torch.no_grad()
def measured(case: Case) -> dict[str, Any]:
    """Milliseconds and relative errors of the kernel and of what it is compared with."""
    beside = case.beside if case.beside is cudnn else torch.compile(case.beside, dynamic=False)
    operations = {"": case.kernel, "beside_": beside}
    reference = case.reference(*case.inputs)
    row = {"case": case.name, "rival": case.rival}
    times: dict[str, list[float]] = {name: [] for name in operations}
    for name, operation in operations.items():
        row[f"{name}error"] = error(operation(*case.inputs), reference)
    for turn in range(ROUNDS + 1):
        for name, operation in operations.items():
            seconds = call(operation, case.inputs)
            if turn:
                times[name].append(seconds)
    return row | {f"{name}ms": 1000 * statistics.median(found) for name, found in times.items()}


def error(result: Any, reference: Any) -> float:
    """Largest relative error, ‖result − reference‖ / ‖reference‖. Rounding to BF16 alone gives 0.0017."""
    pairs = zip(values(result), values(reference), strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def values(result: Any) -> list[Tensor]:
    """Numbers of a result: E4M3 codes [..., C] are multiplied by their scales [..., 1] after them."""
    if isinstance(result, Tensor):
        return [result.float()]
    *others, codes, scales = result
    return [*(x.float() for x in others), codes.float() * scales]


def call(operation: Operation, inputs: tuple[Any, ...]) -> float:
    """Seconds per call on the GPU, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(CALLS):
        operation(*inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / CALLS


if __name__ == "__main__":
    main()
