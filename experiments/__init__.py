"""The paper's tables and figures as recipes: python -m experiments --list"""
