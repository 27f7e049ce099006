from django.urls import path

from examples.django_shop import views

urlpatterns = [path("orders", views.order)]
