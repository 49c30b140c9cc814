"""Environments of other packages as worlds: one file for each package, imported when it is first asked for."""
