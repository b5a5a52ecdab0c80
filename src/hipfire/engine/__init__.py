"""Requests and the offline API."""
