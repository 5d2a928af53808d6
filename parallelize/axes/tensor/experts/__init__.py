"""Mixtures of experts: experts split over tp, or whole on the ranks of ep; their routers, balance and recorded
routes."""
