"""How the platform is set up, started, composed and operated.

Imports everything; nobody imports it.
"""
