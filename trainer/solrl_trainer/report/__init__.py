"""The report of a run: a page, its charts, the grid of images, and the gallery they are drawn from."""
