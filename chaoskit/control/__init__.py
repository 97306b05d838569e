"""Who is in: pure state machines for decisions, thin asyncio shells around them."""
