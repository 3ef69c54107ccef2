"""Lets symtable tell a comprehension's names from those of the code around it, on every version of Python."""

import ast


class AsGenerators(ast.NodeTransformer):
    """Turns every comprehension into a generator expression: that has a scope of its own in every Python's symtable."""

    def visit_ListComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)
