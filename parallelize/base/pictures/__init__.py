"""Pictures and pages without a plotting package or scripts: SVG elements, one style sheet, HTML. Torch-free."""
