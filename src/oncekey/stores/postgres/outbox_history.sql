-- The history with one more attempt that failed: `j` is the row as it was, {error} what went wrong. The oldest go first.
(
    CASE
        WHEN jsonb_array_length(j.history::jsonb) >= {kept} THEN j.history::jsonb - 0
        ELSE j.history::jsonb
    END
    || jsonb_build_array(
        jsonb_build_object('attempt', j.attempt, 'at', date_part('epoch', now()), 'error', {error})
    )
)::text
