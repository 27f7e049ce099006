-- The last statement of an enlisted transaction: it ends the key and stores its response, in the commit of the
-- business writes.
UPDATE idempotency_keys SET
    state = :to_state,
    response_status = :status,
    response_headers = :headers,
    response_schema_version = :schema_version,
    response_body = :body,
    last_error = :last_error,
    reconcile_at = NULL,
    finished_at = CASE WHEN :final THEN :now END,
    expires_at = CASE WHEN :final THEN max(expires_at, :now + retention_seconds) ELSE expires_at END
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'
