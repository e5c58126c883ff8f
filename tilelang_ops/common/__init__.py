"""What operators share: backend dispatch, index formulas, number formats, position-invariant functions."""
