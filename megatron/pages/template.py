"""Builds the templates of pages with jinja2."""

from functools import cache
from typing import Any


@cache
def page_template(package: str) -> Any:
    """Returns the jinja2 template `page.html` of a package. It may extend base.html and import parts.html.

    Text is escaped; what a page marks as `safe` is not.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader  # which takes longer to import than most pages to fill

    loader = ChoiceLoader([PackageLoader(package, ""), PackageLoader("megatron.pages", "")])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("page.html")
