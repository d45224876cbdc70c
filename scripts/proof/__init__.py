"""Test of the images and of docker-compose.yml's demo, using only buildah; started by scripts/prove-images."""
