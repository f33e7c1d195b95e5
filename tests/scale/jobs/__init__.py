"""Task modules that the agents of these tests import."""
