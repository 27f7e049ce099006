-- Store a phase, in the transaction that did its work.
INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, result, created_at)
VALUES (:scope, :key, :name, :kind, 'done', 1, :result, :now)
ON CONFLICT (scope, key, name) DO UPDATE SET
    kind = excluded.kind,
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result
