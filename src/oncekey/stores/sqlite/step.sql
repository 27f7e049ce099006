-- Insert a step, or update it. Its kind never changes, and a NULL does not overwrite the provider's id.
INSERT INTO idempotency_steps (
    scope, key, name, kind, state, repeatable, result, downstream_key, provider_id, created_at
) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (scope, key, name) DO UPDATE SET
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result,
    downstream_key = excluded.downstream_key,
    provider_id = coalesce(excluded.provider_id, provider_id)
