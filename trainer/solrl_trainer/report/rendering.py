"""Rendering of the templates of pages and of the model card."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def environment(**options: Any) -> Environment:
    """Environment of this package's templates, where an undefined name is an error; further `options` of Jinja."""
    return Environment(
        loader=PackageLoader("solrl_trainer.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
