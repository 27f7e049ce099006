-- Delete each row that still is (from_state, owner), and return it as it was.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s
    ) AS w (scope, key, from_state, owner, lease_over_by, past_expiry)
),

{held}

DELETE FROM idempotency_keys AS k
USING held AS w
WHERE k.ctid = w.place
RETURNING {columns}
