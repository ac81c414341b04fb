"""The vocabulary: frozen values without behaviour that reaches outside."""
