"""Distinguish the special tokens that a chat template writes from text of a client that looks like them.

While a template is rendered, each special token in its fixed text is replaced by an unguessable name. So the names in
the rendered text are exactly the special tokens that the template wrote, whatever the template did with the texts of
the client. A client's `<|im_end|>` has no name, so it is plain text. This module knows nothing of token ids.
"""

import re
import secrets
from collections.abc import Iterable, Mapping

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Templates may put the role of a message into a special token: '<|' + message.role + '|>'.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Filters and methods that write arguments into their result -> the index of the first such argument. Arguments of
# others, such as `split`, are only compared.
WRITTEN_ARGUMENTS = {"d": 0, "default": 0, "join": 0, "format": 0, "get": 1, "replace": 1}


class SpecialTokenNames:
    """Names for the special tokens with the given texts.

    A name has digits and square brackets only, so that filters such as `upper` and `tojson` do not change it.
    """

    def __init__(self, contents: Iterable[str]) -> None:
        secret = str(secrets.randbelow(10**32)).zfill(32)
        self.name_of: Mapping[str, str] = {
            content: f"[{secret}{number:06}]" for number, content in enumerate(sorted(filter(None, contents)))
        }
        self.end_mark = f"[{secret[::-1]}999999] "  # ends a message to continue; its space shows whether templates trim
        self._content_of = {name: content for content, name in self.name_of.items()}
        self._names = re.compile(rf"\[{secret}\d{{6}}\]")
        self._contents = re.compile(_any_of(list(self.name_of)) if self.name_of else "(?!)")
        self._overlapping = re.compile(f"(?={self._contents.pattern})")
        self._before_role, self._after_role = f"[{secret}888888]", f"[{secret}999999]"
        parts = {(role, *content.split(role, 1)) for content in self.name_of for role in ROLES if role in content}
        self._beside_roles = {(role, head, tail) for role, head, tail in parts if head and tail}
        self._heads = tuple({head for _, head, _ in self._beside_roles})
        self._tails = tuple({tail for _, _, tail in self._beside_roles})

    def hide(self, text: str) -> str:
        """A text of the template with names for its special tokens, and with marks where a role may complete one."""
        hidden = self._contents.sub(lambda match: self.name_of[match.group()], text)
        if self._heads and hidden.endswith(self._heads):
            hidden += self._before_role
        if self._tails and hidden.startswith(self._tails):
            hidden = self._after_role + hidden
        return hidden

    def hide_in_template(self, tree: nodes.Template) -> None:
        """Hide the special tokens in the fixed texts that a template writes, but not in those that it only compares."""
        _HideTexts(self).visit(tree)

    def complete_roles(self, text: str) -> str:
        """Join the special tokens that the template wrote around a role, and drop the other marks."""
        for role, head, tail in self._beside_roles:
            parts = head + self._before_role + role + self._after_role + tail
            text = text.replace(parts, self.name_of[head + role + tail])
        return text.replace(self._before_role, "").replace(self._after_role, "")

    def show(self, text: str) -> str:
        """A rendered text with the special tokens themselves."""
        text = text.replace(self._before_role, "").replace(self._after_role, "").replace(self.end_mark.strip(), "")
        return self._names.sub(lambda match: self._content_of.get(match.group(), ""), text)

    def are_the_only_ones(self, text: str) -> bool:
        """Whether every special token in `show(text)` comes from a name in `text`."""
        places, num_hidden = set(), 0
        for match in self._names.finditer(text):
            places.add(match.start() - num_hidden)
            num_hidden += len(match.group()) - len(self._content_of[match.group()])
        return places == {match.start() for match in self._overlapping.finditer(self.show(text))}


def _any_of(texts: list[str]) -> str:
    """A regular expression for the longest of some texts that begins at a place.

    Texts with the same beginning share it, so that thousands of them take no longer than a few.
    """
    first, last = min(texts), max(texts)
    num_common = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    common = first[:num_common]
    by_next: dict[str, list[str]] = {}
    for text in texts:
        if rest := text[num_common:]:
            by_next.setdefault(rest[0], []).append(rest[1:])
    branches = "|".join(re.escape(character) + _any_of(rests) for character, rests in by_next.items())
    return re.escape(common) + (f"(?:{branches})" if by_next else "") + ("?" if by_next and common in texts else "")


class _HideTexts(NodeTransformer):
    def __init__(self, names: SpecialTokenNames) -> None:
        self._names = names

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._names.hide(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return nodes.Const(self._names.hide(node.value), lineno=node.lineno) if isinstance(node.value, str) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)  # but not the key
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node.value = self.visit(node.value)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is not None:
            node.node = self.visit(node.node)
        self._visit_arguments(node, node.name)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        function = node.node
        if isinstance(function, nodes.Getattr):
            self.generic_visit(function)
            self._visit_arguments(node, function.attr)
        else:  # a macro or a function
            self.generic_visit(node)
        return node

    def _visit_arguments(self, node: nodes.Filter | nodes.Call, name: str) -> None:
        start = WRITTEN_ARGUMENTS.get(name)
        if start is not None:
            node.args[start:] = [self.visit(argument) for argument in node.args[start:]]
