"""Answers question by question, and what studies say about them."""
