-- The last statement of an enlisted transaction: it ends the key and stores its response, in the commit of the
-- business writes. If the handler ended that transaction, the mark of enlist.sql is gone: 0 rows, and the key does not
-- complete. clock_timestamp, because now() is the time when the transaction began.
UPDATE idempotency_keys AS k SET
    state = CAST(:to_state AS text),
    response_status = CAST(:status AS smallint),
    response_headers = CAST(:headers AS text),
    response_body = CAST(:body AS bytea),
    response_schema_version = CAST(:schema_version AS smallint),
    last_error = CAST(:last_error AS text),
    reconcile_at = NULL,
    finished_at = CASE WHEN CAST(:final AS boolean) THEN clock_timestamp() END,
    expires_at = CASE
        WHEN CAST(:final AS boolean)
            THEN greatest(k.expires_at, clock_timestamp() + k.retention_seconds * interval '1 second')
        ELSE k.expires_at
    END
WHERE
    k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
    AND k.state = 'in_progress' AND current_setting('oncekey.owner', true) = CAST(:owner AS text)
RETURNING
    date_part('epoch', k.lease_until), k.recovery_point, date_part('epoch', k.finished_at),
    date_part('epoch', k.expires_at), date_part('epoch', clock_timestamp())
