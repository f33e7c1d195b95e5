"""Task modules that the fleets of these tests import."""
