"""Control: which requests run when. No tensor maths here."""
