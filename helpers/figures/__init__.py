"""The book's figures in one style, as inline SVG, and sliders that work in JupyterLab and on a page without a kernel.

For notebooks: ``drawing`` has the style and ``show``, ``sliders`` makes a figure function interactive, ``ddp`` has
chapter 4's figures. They import matplotlib and each other, and nothing else of the package.
"""
