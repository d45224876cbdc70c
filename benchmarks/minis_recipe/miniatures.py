"""Table of the miniatures: architecture and training budget of each, on one GPU."""

from minis_recipe.flux import FLUX
from minis_recipe.loop import Budget
from minis_recipe.preference_rewards import HPSV2, IMAGEREWARD, PICKSCORE
from minis_recipe.sana import SANA
from minis_recipe.sd3 import SD3
from minis_recipe.sd3_text import SD3_TEXT
from minis_recipe.stages import Miniature, MiniBackbone, MiniClip, MiniJudge, MiniReward
from minis_recipe.wan import WAN

MINIATURES: dict[str, Miniature] = {
    "mini-sana": MiniBackbone(
        SANA,
        wrong_captions=0.35,
        autoencoder=Budget(steps=2500, batch=256, pool=60_000),
        backbone=Budget(steps=12_000, batch=1024, pool=200_000),
        aware=Budget(steps=4000, batch=512, pool=60_000),
        aware_wrong_captions=0.1,
    ),
    "mini-sd3": MiniBackbone(
        SD3,
        wrong_captions=0.1,
        autoencoder=Budget(steps=3000, batch=192, pool=50_000),
        backbone=Budget(steps=9000, batch=512, pool=120_000),
        rounding=384,
    ),
    "mini-flux": MiniBackbone(
        FLUX,
        wrong_captions=0.1,
        autoencoder=Budget(steps=3000, batch=192, pool=50_000),
        backbone=Budget(steps=4000, batch=384, pool=120_000),
        rounding=384,
        parts_from="mini-sd3",
    ),
    "mini-text": MiniBackbone(
        SD3_TEXT,
        wrong_captions=0.95,  # all that are not empty
        autoencoder=Budget(steps=3000, batch=32, pool=4096),
        backbone=Budget(steps=6000, batch=64, pool=20_000),
        rounding=384,
    ),
    "mini-wan": MiniBackbone(
        WAN,
        wrong_captions=0.1,
        autoencoder=Budget(steps=4000, batch=64, pool=8192),
        backbone=Budget(steps=13_000, batch=256, pool=60_000),
    ),
    "mini-clip": MiniClip(Budget(steps=6000, batch=512, pool=80_000), generated=4000),
    "mini-pickscore": MiniReward(PICKSCORE, Budget(steps=1500, batch=128, pool=18_000)),
    "mini-hpsv2": MiniReward(HPSV2, Budget(steps=2500, batch=128, pool=18_000)),
    "mini-imagereward": MiniReward(IMAGEREWARD, Budget(steps=6000, batch=128, pool=24_000)),
    "mini-judge": MiniJudge(Budget(steps=2000, batch=32, pool=0)),
}
