-- One line of the audit for each moved row whose swap has one.
noted AS (
    INSERT INTO idempotency_audit (who, event, scope, key, before, after, why)
    SELECT m.who, m.event, m.scope, m.key, m.before, m.after, m.why
    FROM moved AS m
    WHERE m.who IS NOT NULL
)
