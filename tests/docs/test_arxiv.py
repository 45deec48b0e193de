"""Numbers of arXiv become links, outside of code and of links."""

from __future__ import annotations

from helpers.pages import making

linked = making("arxiv").linked


def test_numbers_become_links_where_they_are_text():
    url = "https://arxiv.org/abs/2010.01412"
    assert linked("SAM (Foret et al.; arXiv 2010.01412).") == f"SAM (Foret et al.; [arXiv 2010.01412]({url}))."
    assert linked("arXiv:2010.01412") == f"[arXiv 2010.01412]({url})"
    for same in (
        "`arXiv 2010.01412`",
        f"[arXiv 2010.01412]({url})",
        "```\narXiv 2010.01412\n```",
        "    arXiv 2010.01412",
    ):
        assert linked(same) == same
