"""Proof of the images and of docker-compose.yml's demo with buildah alone; started by scripts/prove-images."""
