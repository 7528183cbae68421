"""Verification: π(A) computes what A does, and tables are true of their families; drafts of tables."""
