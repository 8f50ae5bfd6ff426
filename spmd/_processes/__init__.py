"""Speaks for all processes of a program: who they are, whether they agree, how equal arrays reach all devices."""
