-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- Jobs by tenant: a claim takes a part of them in turns, so that one tenant's thousands do not delay another's.
CREATE INDEX IF NOT EXISTS idempotency_outbox_turns ON idempotency_outbox (scope, run_at) WHERE state = 'ready';
