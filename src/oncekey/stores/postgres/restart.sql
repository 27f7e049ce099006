-- A key starts over after its expiry: attempt 1, a new request, nothing of the old request or its steps.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(operation)s, %(fingerprint)s, %(fingerprint_version)s, %(effects)s, %(new_owner)s,
        %(lease_seconds)s, %(retention_seconds)s, %(fingerprint_recipe)s, %(quarantine_seconds)s, %(event)s, %(who)s, %(why)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        operation, fingerprint, fingerprint_version, effects, new_owner, lease_seconds, retention_seconds,
        fingerprint_recipe, quarantine_seconds, event, who, why
    )
),

{held},

moved AS (
    UPDATE idempotency_keys AS k SET
        operation = w.operation,
        fingerprint = w.fingerprint,
        fingerprint_version = w.fingerprint_version,
        fingerprint_recipe = w.fingerprint_recipe,
        quarantine_seconds = w.quarantine_seconds,
        effects = w.effects,
        state = 'in_progress',
        attempt = 1,
        owner = w.new_owner,
        lease_until = now() + w.lease_seconds * interval '1 second',
        recovery_point = NULL,
        response_status = NULL,
        response_headers = NULL,
        response_body = NULL,
        response_schema_version = NULL,
        last_error = NULL,
        reconcile_at = NULL,
        reconcile_tries = 0,
        created_at = now(),
        finished_at = NULL,
        retention_seconds = w.retention_seconds,
        expires_at = now() + w.retention_seconds * interval '1 second'
    FROM held AS w
    WHERE k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
    RETURNING k.*, true AS forgets, w.event, w.from_state AS before, k.state AS after, w.who, w.why
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k
