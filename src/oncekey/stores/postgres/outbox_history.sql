-- The history with one more failed attempt. `j` is the row as it was, {error} the error. The oldest are dropped first.
(
    CASE
        WHEN jsonb_array_length(j.history::jsonb) >= {kept} THEN j.history::jsonb - 0
        ELSE j.history::jsonb
    END
    || jsonb_build_array(
        jsonb_build_object('attempt', j.attempt, 'at', date_part('epoch', now()), 'error', {error})
    )
)::text
