"""The way of a prompt's candidates: explored at a service or here, selected, regenerated and scored."""
