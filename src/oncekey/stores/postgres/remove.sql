-- Delete each row that still is (from_state, owner), with its steps, and return it as it was. A key in progress is
-- deleted only in its first attempt, and without steps.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(event)s, %(who)s, %(why)s
    ) AS w (scope, key, from_state, owner, lease_over_by, past_expiry, event, who, why)
),

{held},

moved AS (
    DELETE FROM idempotency_keys AS k
    USING held AS w
    WHERE
        k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
        AND (k.state <> 'in_progress' OR (k.attempt = 1 AND k.recovery_point IS NULL))
    RETURNING k.*, true AS forgets, w.event, w.from_state AS before, NULL::text AS after, w.who, w.why
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k
