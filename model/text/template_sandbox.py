"""The environment in which chat templates run: Jinja's sandbox as transformers configures it, with limits.

A template of a checkpoint may be hostile, and so may the messages. Jinja's sandbox keeps a template from reaching
anything but its variables, but it may still loop for hours or fill the memory. So this environment changes the syntax
tree of a template: each step of a loop, each comparison, each fixed text and each new list checks the budget.
Operators, calls, filters and tests check it as well. No operation takes long by itself, because the size of its result
is limited.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from model.text import template_operations as operations
from model.text.template_budget import CONTAINERS, Budget, current, size_of, spending

# Filters that only the changed syntax tree uses.
SPEND, KEEP, CONCATENATE, PLAIN = "_spend", "_keep", "_concatenate", "_plain"


class TemplateDict:
    """The function `dict` of templates. It is not the class, so that templates cannot reach its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """The function `namespace` of templates. Its `repr` omits the attributes, which may contain it again."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may have any name, such as `self`
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name of an attribute must not begin with an underscore: {name!r}")


class GenerationBlocks(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which mark what an assistant wrote. They have no other effect."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates, and gives them the functions and filters that transformers gives them."""

    intercepted_binops = frozenset(operations.OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.filters |= {
            "tojson": operations.to_json,
            "join": operations.join,
            "replace": operations.replace,
            "string": operations.as_text,
            "trim": operations.trim,
        }
        for name in operations.REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: operations.bounded_filter(name, call) for name, call in self.filters.items()}
        self.filters |= {SPEND: operations.spend, KEEP: operations.keep}
        self.filters |= {CONCATENATE: operations.concatenate, PLAIN: operations.without_stand_ins}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: operations.bounded_test(call) for name, call in tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": operations.raise_exception,
            "strftime_now": operations.strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }

    def compile_limited(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a syntax tree, which is changed. Raises `jinja2.TemplateError` for unknown filters and tests."""
        for block in tree.find_all((nodes.ScopedEvalContextModifier, nodes.EvalContextModifier)):
            raise jinja2.TemplateSyntaxError("autoescape blocks are not available in chat templates", block.lineno)
        limited = _AddLimits().visit(tree)
        limited.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(limited), self.make_globals(None))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return operations.apply_operator(operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template: of a macro, of a method, of a function."""
        budget = current()
        budget.tick()
        named = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # Jinja's own
        budget.size((args, named))
        text = getattr(function, "__self__", None)
        with budget.nested():
            if isinstance(text, str) and hasattr(function, "__name__"):
                return budget.keep(operations.call_string_method(text, function, *args, **named))
            if isinstance(text, (int, float)):
                operations.check_width(*args)
            return budget.keep(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of Jinja's sandbox, within the budget."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        format_text = wrapped

        def run(*args: Any, **kwargs: Any) -> str:
            operations.check_format(str(value.__self__), (args, kwargs), "{")
            return format_text(*args, **kwargs)

        return run


@pass_context  # so that Jinja does not call it for constants when it compiles the template
def _finalize(_: Any, value: Any) -> Any:
    """Count a value that a template writes."""
    budget = current()
    budget.tick()
    if isinstance(value, CONTAINERS):
        budget.size(value)
    text = operations.as_text(value)
    budget.spend(len(text))
    return text


class _AddLimits(NodeTransformer):
    """Add budget checks to the parts of a template that are not operators, calls, filters or tests."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(0, node.lineno))
        if node.test is not None:
            node.test = nodes.And(_spend(0, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.generic_visit(node)
        return [_statement(size, node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCATENATE)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        kept = self._kept(node)
        node.expr = _filtered(node.expr, PLAIN)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, PLAIN)
        return kept

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._kept(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._kept(node)
        self.generic_visit(node)
        return node

    def _kept(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, KEEP)

    visit_List = visit_Dict = _kept


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _spend(num_bytes: int, line: int) -> nodes.Expr:
    return _filtered(nodes.Const(num_bytes, lineno=line), SPEND)


def _statement(num_bytes: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_spend(num_bytes, line), lineno=line)


NONE: Mapping[str, str] = {}


def render(template: jinja2.Template, variables: Mapping[str, Any], stand_ins: Mapping[str, str] = NONE) -> str:
    """The text of a template. Raises `TooExpensive`, or any exception that the template causes.

    `stand_ins` are characters in texts of `variables`, and what they stand for. The template compares and searches
    texts as if they had none.
    """
    variables = dict(variables)
    with spending(Budget(size_of(variables), stand_ins)):
        return "".join(template.root_render_func(template.new_context(variables)))
