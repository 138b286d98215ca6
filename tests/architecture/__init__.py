"""Tests of the shape of the code: layers, sizes, public interface, import weight, text."""
