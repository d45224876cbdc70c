"""Users' paths: `~` is the home folder, even if no shell has expanded it."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_proto.model_names import CHECKPOINT


def with_home(value: Any) -> Any:
    """A value of settings, with the home folder for `~` at the start of texts and paths, such as `~/models`.

    Also the paths inside mappings, lists and dataclasses, and both parts of `FILE.safetensors+MODEL`.
    """
    if isinstance(value, str):
        plus = f"{CHECKPOINT}+"
        return plus.join(os.path.expanduser(part) for part in value.split(plus)) if "~" in value else value
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if isinstance(value, Mapping):
        return {with_home(key): with_home(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(with_home, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(value, **{name: with_home(getattr(value, name)) for name in fields})
    return value
