"""The engine: federations, clients, the runtime that computes, and the ledger of what they send."""
