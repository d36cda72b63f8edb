"""A three-tier prefix cache for hybrid language models, built to be studied."""
