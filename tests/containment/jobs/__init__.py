"""Task modules of the containment tests; this folder is a task path, so they are imported by their bare names."""
