"""Pages for a browser: one head, one set of styles and parts for all of them (base.html, parts.html).

A page is a template `page.html` in the package that fills it. It extends base.html, and needs no network.
"""

from megatron.pages.template import page_template
