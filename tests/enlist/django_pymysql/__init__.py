"""Django's backend of MySQL on PyMySQL. A project gets it by ``pymysql.install_as_MySQLdb()``."""
