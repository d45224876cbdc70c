"""Images of odd shapes, which rewards enlarge: refused, or scored at a bounded cost."""

from fault_trials.findings import Findings, Row, Tell
from fault_trials.reward_process import cost, reward_service, scoring

_REWARD = "clipscore"
_SHAPES = {
    (1, 1, 100_000): 422,
    (1, 100_000, 1): 422,
    (256, 1, 3000): 422,
    (256, 3000, 1): 422,
    (1, 1000, 8001): 422,
    (256, 1, 9): 422,
    (256, 1, 8): 200,
    (256, 8, 1): 200,
    (128, 64, 512): 200,
    (1, 1024, 8192): 200,
}
"""Number, height and width of images, and the status of the answer."""


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Ask for scores `trials` times, of one shape after the other."""
    flags = ("--rewards", _REWARD, "--options-from", "mini-sana")
    with reward_service(*flags, environment={"OMP_NUM_THREADS": "1"}) as service:
        service.ask(scoring(_REWARD)).raise_for_status()
        for trial in range(trials):
            (count, height, width), status = list(_SHAPES.items())[trial % len(_SHAPES)]
            what, body = f"{count} of {height} × {width}", scoring(_REWARD, count, height, width)
            answer, spent = cost(service.program.pid, service.url, lambda body=body: service.ask(body))
            findings.require(answer.status_code == status, what, f"answered {answer.status_code} {answer.text[:200]}")
            spent.judge(what, findings)
            findings.trials += 1
            findings.add(f"answered {answer.status_code}")
            tell(what)


ROW = Row(
    "odd-images",
    "images of one row or column, or at the bounds of side and ratio: refused beyond them, scored within; at most "
    "300 MB more than idle, and the reward service says within 1 s that it is live",
    full=20,
    short=3,
    run=run,
)
