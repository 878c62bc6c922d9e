"""Everything about sandboxes that is not one provider's: snapshots, the warm pool, the resident helper and relay, what
remote providers build on; and the built-in providers."""
