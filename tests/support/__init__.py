"""What tests of several rooms share: paths, golden data, comparisons, clean environments."""
