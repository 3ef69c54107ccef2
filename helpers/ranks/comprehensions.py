"""What symtable needs to tell a comprehension's names from those of the code around it."""

import ast


class AsGenerators(ast.NodeTransformer):
    """Every comprehension as a generator, which has a scope of its own in symtable on every Python."""

    def visit_ListComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)
