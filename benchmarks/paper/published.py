"""Figures of the paper (arXiv 2604.06916), on its large models. They stand beside ours; the scales differ."""

FINAL = {
    "Base": {"imagereward": 0.455, "clipscore": 0.2630, "pickscore": 0.8096, "hpsv2": 0.2566},
    "DanceGRPO": {"imagereward": 1.4937, "clipscore": 0.2898, "pickscore": 0.8807, "hpsv2": 0.3552},
    "FlowGRPO": {"imagereward": 1.5331, "clipscore": 0.2884, "pickscore": 0.8743, "hpsv2": 0.3501},
    "AWM": {"imagereward": 1.6693, "clipscore": 0.3039, "pickscore": 0.8842, "hpsv2": 0.3664},
    "DiffusionNFT": {"imagereward": 1.6707, "clipscore": 0.2991, "pickscore": 0.8852, "hpsv2": 0.3613},
    "Sol-RL": {"imagereward": 1.7636, "clipscore": 0.3089, "pickscore": 0.8932, "hpsv2": 0.3688},
}
"""Final rewards of FLUX.1, by algorithm and trained reward."""
SPEED_UP = (2.42, 4.64)
"""Smallest and largest speed-up of convergence over 24-in-24, in time."""
HPSV2_BY_CANDIDATES = {24: 0.3569, 48: 0.3622, 72: 0.3663, 96: 0.3686}
HPSV2_BY_STEPS = {2: 0.3587, 4: 0.3650, 6: 0.3686, 8: 0.3659}
GAP = 0.01
"""Sol-RL's gap to BF16 24-in-96, as the paper states it."""
SPEARMAN = "0.90 to 0.94"
KENDALL = "0.75 to 0.83"
MATCHES = "96.9, 95.0 and 93.3 %"
"""Share of the true best and worst 4, 8 and 12 of 96 that exploration selects."""
PHASE = "2.33, 2.41 and 1.41 ×"
WHOLE = "1.62, 1.61 and 1.25 ×"
"""Speed-ups of a rollout phase and of a whole iteration, of FLUX.1, SD3.5-Large and SANA."""
SYNC = "about 2 %"
"""Share of an iteration that sending weights takes."""
