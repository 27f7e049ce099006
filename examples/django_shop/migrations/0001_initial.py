from django.db import migrations, models

from oncekey.web.django.operations import MigrateOnceKey


class Migration(migrations.Migration):
    atomic = False
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.CharField(max_length=100)),
                ("item", models.CharField(max_length=100)),
            ],
        ),
        MigrateOnceKey(),  # oncekey's own tables
    ]
