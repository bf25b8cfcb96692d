"""Measurements of single parts against their peer or limit: `paravt bench NAME`."""
