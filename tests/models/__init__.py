"""Models: golden data of an independent implementation, and equalities of the whole forward."""
