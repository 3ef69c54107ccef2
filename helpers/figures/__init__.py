"""The book's figures in one style, as inline SVG, and sliders that work in JupyterLab and on a page without a kernel.

For notebooks: ``drawing`` has the style and ``show``, ``sliders`` makes a figure function interactive, ``collectives``
has figures of chapters 1 and 2, and ``ddp`` has chapter 4's. They import matplotlib and each other, and nothing else of
the package.
"""
